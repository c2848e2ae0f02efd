from foretoken.bench.app import app

if __name__ == "__main__":
    app(prog_name="python -m foretoken.bench")
