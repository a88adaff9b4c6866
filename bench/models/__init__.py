"""The models of the benches as files that any server loads: Hugging Face directories and GGUFs."""
