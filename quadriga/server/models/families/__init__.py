"""What a config.json says, as the worker builds models from it, without torch.

One function for each model_type; architectures.py has the table of them.
"""
