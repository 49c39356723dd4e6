"""Other ways to make a sandbox, measured on the same root in the same run.

`drivers` is the table of peers, `arena` the closed environment each of them runs in, `stage` the
bench's end of an arena.
"""
