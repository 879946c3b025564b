"""What people wrote that broke: inputs that are none, and models out of the ordinary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_equal_trees
from jax import lax

import jaxckpt
from jaxckpt.memory import predict_step
