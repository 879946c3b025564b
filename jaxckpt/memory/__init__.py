"""The memory model: what a step will hold, worked out from its jaxpr.

lower   jaxpr -> operations over buffers
fuse    which values are stored
order   the orders that the compiler chooses from
peak    the most bytes held at once
predict the whole step, in one record
"""

from jaxckpt.memory.predict import Phase as Phase
from jaxckpt.memory.predict import Prediction as Prediction
from jaxckpt.memory.predict import predict as predict
from jaxckpt.memory.predict import predict_step as predict_step
