"""The live feed: one message a step, made only while a client watches."""
