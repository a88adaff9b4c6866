from http_proc.main import main

main()
