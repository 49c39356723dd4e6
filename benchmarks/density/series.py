"""The names of the series of `dsec-bench density`, which the picture finds again."""

IDLE = "answers of idle sandboxes"
PAUSED = "paused Pythons"
CALLS = "calls of a function"
BESIDE = "20 ms of work beside a load"
REPLAY = "turns of agents"
