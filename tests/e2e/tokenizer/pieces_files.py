VOCAB_FILES_NAMES = {"vocab_file": "tokenizer.model"}
