"""The driver of a cluster: places replicas on machines, and starts lost ones again."""
