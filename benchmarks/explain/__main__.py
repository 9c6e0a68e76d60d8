from benchmarks.explain.records import main, parse_args

main(parse_args())
