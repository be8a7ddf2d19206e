"""`python -m holdfast.trainer`: the process of one trainer, or of one of its ranks."""

from holdfast.trainer.process import main

if __name__ == "__main__":
    main()
