"""The paper's own numbers: arXiv 2505.19281v2."""

# Figure 6(b), Tables 2 (three seeds), 3, 4 and 5; mean and standard error.
PAPER = {
    "fig6": {
        "FrozenLake": {"SE_ave": "34.0 ± 2.0", "SE_peak": "19.2 ± 5.9", "RT_peak": "29.5 ± 2.9"},
        "Acrobot": {"SE_ave": "36.7 ± 6.5", "SE_peak": "48.5 ± 0.8", "RT_peak": "55.2 ± 1.0"},
        "MiniGrid": {"SE_ave": "65.8 ± 3.3", "SE_peak": "61.7 ± 4.1", "RT_peak": "69.1 ± 1.7"},
        "Highway": {"SE_ave": "37.7 ± 6.1", "SE_peak": "55.1 ± 2.9", "RT_peak": "59.9 ± 0.7"},
        "LunarLander": {"SE_ave": "26.0 ± 1.8", "SE_peak": "39.7 ± 3.7", "RT_peak": "44.9 ± 2.5"},
        "BipedalWalker": {"SE_ave": "31.0 ± 8.7", "SE_peak": "26.2 ± 8.0", "RT_peak": "29.2 ± 0.7"},
    },
    "adam": {
        "MiniGrid": {"SE_ave": "24.1 ± 1.4", "SE_peak": "13.3 ± 3.1", "RT_peak": "18.5 ± 1.0"},
        "LunarLander": {"SE_ave": "46.7 ± 4.5", "SE_peak": "62.2 ± 5.0", "RT_peak": "65.9 ± 3.2"},
    },
    "percent": {
        "FrozenLake": {
            "12.5": {"SE_ave": "23.5 ± 3.1", "SE_peak": "15.6 ± 5.1"},
            "25": {"SE_ave": "30.5 ± 3.3", "SE_peak": "22.1 ± 7.4"},
            "50": {"SE_ave": "33.7 ± 3.4", "SE_peak": "19.6 ± 8.4"},
            "100": {"SE_ave": "32.7 ± 1.7", "SE_peak": "15.9 ± 5.5"},
        },
        "Acrobot": {
            "12.5": {"SE_ave": "29.2 ± 0.8", "SE_peak": "31.5 ± 2.2"},
            "25": {"SE_ave": "35.1 ± 0.6", "SE_peak": "48.5 ± 0.8"},
            "50": {"SE_ave": "36.7 ± 6.5", "SE_peak": "48.5 ± 0.8"},
            "100": {"SE_ave": "35.0 ± 0.5", "SE_peak": "43.1 ± 5.7"},
        },
        "MiniGrid": {
            "12.5": {"SE_ave": "67.5 ± 5.1", "SE_peak": "67.4 ± 4.4"},
            "25": {"SE_ave": "60.3 ± 10.6", "SE_peak": "58.8 ± 13.1"},
            "50": {"SE_ave": "67.0 ± 5.3", "SE_peak": "50.6 ± 20.7"},
            "100": {"SE_ave": "75.4 ± 3.6", "SE_peak": "54.9 ± 22.5"},
        },
        "LunarLander": {
            "12.5": {"SE_ave": "28.2 ± 1.3", "SE_peak": "41.6 ± 5.7"},
            "25": {"SE_ave": "22.7 ± 5.6", "SE_peak": "32.9 ± 13.1"},
            "50": {"SE_ave": "10.2 ± 6.5", "SE_peak": "15.5 ± 17.1"},
            "100": {"SE_ave": "8.9 ± 2.0", "SE_peak": "15.8 ± 7.3"},
        },
    },
    "final": {"MiniGrid": "[0.04, 0.33]", "LunarLander": "[22.54, 130.52]", "BipedalWalker": "[24.40, 75.99]"},
    "runtime": {  # seconds: scoring a round; optimisation a round, of IIF and of the standard run; all rounds, of both
        "FrozenLake": (0.11, 1.51, 2.01, 82.15, 93.85),
        "Acrobot": (0.25, 1.42, 2.02, 70.01, 79.87),
        "MiniGrid": (0.25, 4.52, 5.02, 365.23, 378.41),
        "Highway": (0.13, 2.39, 3.29, 214.41, 233.66),
        "LunarLander": (0.13, 1.85, 2.05, 318.68, 328.79),
        "BipedalWalker": (0.12, 3.09, 3.30, 676.78, 691.28),
    },
}
