"""`stretto plan`: how many GPUs a load needs, in which groups, and what its users would see. No torch in this package.

    shapes     sizes of a model           hardware   rates of a device
    steps      seconds of a step of one on the other, for host/cost.py
    load       requests: drawn, or from a trace
    simulate   one replica under a load   options    every grouping, the fewest GPUs first   report   for people
"""
