"""Files of adapters (LoRA), read without torch: their identity, their settings, a first check."""
