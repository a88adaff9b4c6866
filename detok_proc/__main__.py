from detok_proc.main import main

main()
