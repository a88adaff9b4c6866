"""Tell the clients of streams that wait how far their requests are."""
