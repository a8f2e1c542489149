"""How bytes move between a page's file on an SSD and its file in DRAM. Mechanism only."""
