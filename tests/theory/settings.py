"""The compensators that the theory's tests run: the paper's at both gains, single step, one average, and none."""

from dataclasses import replace

from echoreduce.config import NO_FEEDBACK, PRESETS, FeedbackConfig

PAPER = PRESETS["paper"].feedback
PAPER_FULL = replace(PAPER, gain=1.0)
SINGLE = FeedbackConfig(gain=1.0, decays=(0.0, 0.0))
ONE_AVERAGE = FeedbackConfig(gain=1.0, decays=(0.8, 0.8))
HALF = FeedbackConfig(gain=0.5, blend=0.2, decays=(0.9, 0.1))

FULL_GAIN = {"paper-full": PAPER_FULL, "single": SINGLE, "one-average": ONE_AVERAGE}
ALL = {**FULL_GAIN, "paper": PAPER, "half": HALF, "none": NO_FEEDBACK}
