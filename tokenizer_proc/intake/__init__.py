"""A request's way from its arrival to the scheduler: limits, tenants, processes for long ones."""
