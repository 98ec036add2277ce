"""Measures the pauses of this VM during an event.

The last record of an event contains the result in the field `impact`.

`judgement` decides whether a late timer or a clock step was a pause. `report` builds the impact of one event. Neither
module reads a clock or does I/O. `sampler` reads the clocks on a separate thread.
"""
