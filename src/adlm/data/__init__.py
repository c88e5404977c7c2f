"""Text in, batches of token sequences out. Imports only errors, rules, schema, tables and io.paths, and never torch.

    cfg = DataConfig(name="pydocs")
    tokenizer = tokenizer_for(cfg)
    blocks = prepare(cfg, tokenizer, length=128, split="train")
    for batch in Batches(blocks, seed=1, global_batch_size=32): ...

| module | |
|---|---|
| corpora | the public data sets: where each comes from and how it is read; the documentation inside every CPython |
| sources | which documents a split consists of: local files, the hub, or a module such as pydocs |
| formats | readers of local files, detokenizers |
| remote | the Hugging Face hub, and corpora at URLs |
| tokenizers | text to ids and back |
| packing | documents to sequences of one length |
| blocks | prepared sequences on disk, the cache folder |
| preparation | all of this in order: `prepare`, `tokenizer_for`, `adlm data` |
| loader | the order of the sequences in training |
"""
