"""Training: a step, a loop, byte-level text and an optimizer."""

from jaxckpt.training.data import byte_batches as byte_batches
from jaxckpt.training.data import read_bytes as read_bytes
from jaxckpt.training.data import unigram_entropy as unigram_entropy
from jaxckpt.training.loop import TrainResult as TrainResult
from jaxckpt.training.loop import evaluate as evaluate
from jaxckpt.training.loop import train as train
from jaxckpt.training.optimizer import adamw as adamw
from jaxckpt.training.state import TrainState as TrainState
from jaxckpt.training.state import abstract_state as abstract_state
from jaxckpt.training.step import make_train_step as make_train_step
from jaxckpt.training.step import train_step_fn as train_step_fn
