"""Explicit forward and backward passes by a list of actions.

Lists come from generators (`binomial`, `mixed`, `two_level`, `actions_from`) or are
written by hand; `simulate` says what one takes, or why it is illegal.
`checkpoint_chain` runs it inside a compiled program, `ManualCheckpoint` from the host.
"""

from jaxckpt.executor.actions import Action as Action
from jaxckpt.executor.actions import ActionList as ActionList
from jaxckpt.executor.actions import Advance as Advance
from jaxckpt.executor.actions import Costs as Costs
from jaxckpt.executor.actions import Drop as Drop
from jaxckpt.executor.actions import Keep as Keep
from jaxckpt.executor.actions import Load as Load
from jaxckpt.executor.actions import Reverse as Reverse
from jaxckpt.executor.entries import repeat as repeat
from jaxckpt.executor.from_schedule import actions_from as actions_from
from jaxckpt.executor.manual import ManualCheckpoint as ManualCheckpoint
from jaxckpt.executor.revolve import binomial as binomial
from jaxckpt.executor.revolve import mixed as mixed
from jaxckpt.executor.revolve import two_level as two_level
from jaxckpt.executor.run import checkpoint_chain as checkpoint_chain
from jaxckpt.executor.simulate import Record as Record
from jaxckpt.executor.simulate import simulate as simulate
from jaxckpt.executor.updates import (
    apply_updates_in_backward as apply_updates_in_backward,
)
