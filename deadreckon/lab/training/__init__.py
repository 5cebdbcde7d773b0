"""Training: the engine, CUDA graphs, runs and checkpoints."""

from deadreckon.lab.training.checkpoints import export
from deadreckon.lab.training.engine import Step, Training, make_model, train
from deadreckon.lab.training.ranks import Ranks
from deadreckon.lab.training.runs import Progress, Run, find_runs
from deadreckon.lab.training.scoring import score_folder, score_model, score_run, summary
from deadreckon.lab.training.trainer import train_run
