"""A small, real GRPO trainer: a tiny transformer learns chained arithmetic with a calculator, in Ray actors, on CPU.

It differs from what one would run on a cluster in size only: configuration, metrics, traces and checkpoints have verl's
names, and it records itself with `spool` as any user's trainer would. `python -m trainer --help`; docs/trainer.md.

    config      keys, defaults, refusals            loop        the training, step by step
    tokenizer   characters                          workers     Ray actors, or this process
    model       tiny GPT                            rollout     one worker
    tasks       problems, reward, demonstrations    decoder     batched decoding
    tools       the calculator                      agent_loop  one trajectory
    algo        GRPO as functions                   learner     warm-up and update
    checkpoint  save, resume                        metrics     verl's names
    ledger      recording, and its independent list
"""
