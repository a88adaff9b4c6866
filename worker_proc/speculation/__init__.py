"""Draft tokens: by earlier text, or by the model itself in fewer bits."""
