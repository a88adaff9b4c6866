"""Tenants: who a request belongs to, what each may use, and the file that says so."""
