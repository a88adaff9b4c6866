"""The real scheduler, router and scaling of a server in simulated time.

A load is a list of TraceRequests, a worker is a cost model. `world.World` runs them, and
`report.figures` sums up. `what_if` is the program that a gateway starts.
"""
