"""Prints what TensorBoard reads of a directory of event files: for each tag its steps and numbers, as JSON."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

accumulator = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
accumulator.Reload()
tags = accumulator.Tags()["scalars"]
print(json.dumps({tag: [[event.step, event.value, event.wall_time] for event in accumulator.Scalars(tag)] for tag in tags}))
