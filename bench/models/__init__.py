"""Write the models of the benches as files that any server loads."""
