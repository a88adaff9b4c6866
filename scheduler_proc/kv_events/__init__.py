"""Events of the prefix cache for routers of clusters: --kv-events-config."""
