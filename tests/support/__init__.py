"""What tests share: runs made by hand, readers of exports, ways to start ranks."""
