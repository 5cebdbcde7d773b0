"""`python -m deadreckon` is `deadreckon`; so `torchrun -m deadreckon train …` works."""

from deadreckon.lab.cli import main

if __name__ == "__main__":
    main()
