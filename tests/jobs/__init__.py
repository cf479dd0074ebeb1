"""Whole training scripts of one process: started, stopped, resumed, compared."""
