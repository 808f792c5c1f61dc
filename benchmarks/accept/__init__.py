"""What `appliance accept` runs on a host with a GPU: everything that was never run on one, row by row.

Without a GPU the same rows run on the CPU at tiny sizes, with CPU kernels instead of those for CUDA: a rehearsal
of the code, and a promise of nothing.
"""
