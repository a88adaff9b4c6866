from worker_proc.main import main

main()
