"""llama.cpp's /infill."""
