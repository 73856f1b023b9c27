"""The zoo: networks as people have them, each trained privately and compared with autograd record by record."""
