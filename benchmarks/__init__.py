"""dsec-bench: what DSec costs, beside what others cost, on this machine, in one run."""
