"""Makes the demo checkpoint: a tiny Baichuan2 that summarises a docstring's body in its first line.

corpus.py           installed packages' sources -> (document, summary) pairs
decontaminate.py    drops training pairs that are close to an evaluation pair
tokenizer.py        pairs -> sentencepiece BPE model with Baichuan2's role tokens
model.py            Baichuan2-7B's architecture at small size, for training only
batches.py          pairs -> padded id matrices in length buckets
optimizer.py        Muon for the matrices, AdamW for the rest
train.py            the loop
export.py           weights -> Hugging Face folder
score.py            greedy summaries of the evaluation pairs, ROUGE
"""
