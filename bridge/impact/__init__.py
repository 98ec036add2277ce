"""Measures the pauses of this VM during an event.

The record that ends the event contains the result as its `impact`.

`judgement` decides what a late timer or a clock step means. `report` builds the impact of one event. Both modules are
pure. `sampler` reads the clocks on a thread.
"""
