"""The order of the samples, and a position in it that is valid for any number of ranks.

Entry: `sampler.ElasticSampler`.
Imports: `errors`.
Never here: saving, communication of ranks, reading a clock, drawing from a global random state.
Next of its kind: another sampler beside `sampler.py`; `permutation.py` is frozen, a new order is a new function.
"""
