from tokenizer_proc.main import main

main()
