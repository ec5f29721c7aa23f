"""A small, real GRPO trainer: a tiny transformer learns chained arithmetic with a calculator, in Ray actors, on CPU.

It differs from what one would run on a cluster in size only: configuration, metrics, traces and checkpoints have verl's
names, and it records itself with `spool` as any user's trainer would. `python -m trainer --help`; docs/trainer.md.

    config      keys, defaults, refusals            loop        the training, step by step
    tokenizer   characters                          workers     Ray actors, or this process
    model       tiny GPT                            rollout     one worker
    tasks       chained arithmetic, its reward      decoder     batched decoding
    data        files of problems                   agent_loop  one trajectory
    tools       the calculator                      learner     warm-up and update
    algo        GRPO as functions                   metrics     verl's names
    checkpoint  save, resume                        ledger      recording, and its independent list
"""
