"""Measures the pauses of this VM during an event.

The last record of an event contains the measured pauses in its `impact` field.

`sampler` reads the clocks, `judgement` decides whether a late timer or a clock step means that the VM was paused, and
`report` builds the impact of one event. `judgement` and `report` read no clocks and do no I/O.
"""
