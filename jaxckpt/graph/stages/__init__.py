"""A program as a chain of stages: what stands before the layers, the layers, the head.

`chain` holds the records and `stages`; loops are found by `scan`, layers that stand one
after another by `runs`, `row`, `match` and `layers`, cuts by `cut` and `pieces`; equal
ones are known by `keys`, names come from `names`, a user's marks from `marks`.
"""

from jaxckpt.graph.stages.chain import Chain as Chain
from jaxckpt.graph.stages.chain import Stack as Stack
from jaxckpt.graph.stages.chain import Stage as Stage
from jaxckpt.graph.stages.chain import stages as stages
from jaxckpt.graph.stages.marks import mark_stage as mark_stage
