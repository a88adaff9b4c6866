"""What the server is made of, for launcher.py, the processes and the command `quadriga`.

A program that uses the client library, or LLM, imports nothing of it.
"""
