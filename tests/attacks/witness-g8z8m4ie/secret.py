text = '008473b52aa264ad'
