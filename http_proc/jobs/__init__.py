"""Files and batches: uploads, and the jobs that answer files of requests."""
