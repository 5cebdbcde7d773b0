"""`python -m deadreckon` is `deadreckon`."""

from deadreckon.lab.cli import main

if __name__ == "__main__":
    main()
