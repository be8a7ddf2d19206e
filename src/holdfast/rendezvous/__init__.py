"""Rendezvous: cycles, ranks, spares, on the ledger."""
