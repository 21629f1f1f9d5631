"""Question sets from the Hugging Face hub, as rows of the local layout. Used only when the hub is allowed."""

from typing import Any

from kvbench.models.download import quiet

# task: (repository, config or None for one config a subject, split of the questions, split of the examples)
PLACES: dict[str, tuple[str, str | None, str, str]] = {
    "mmlu": ("cais/mmlu", "all", "test", "dev"),
    "ceval": ("ceval/ceval-exam", None, "val", "dev"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", "validation"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", "validation"),
}

# C-Eval's subjects and the Chinese names that its prompts use.
CEVAL_SUBJECTS: dict[str, str] = {
    "accountant": "注册会计师", "advanced_mathematics": "高等数学", "art_studies": "艺术学",
    "basic_medicine": "基础医学", "business_administration": "工商管理",
    "chinese_language_and_literature": "中国语言文学", "civil_servant": "公务员",
    "clinical_medicine": "临床医学", "college_chemistry": "大学化学", "college_economics": "大学经济学",
    "college_physics": "大学物理", "college_programming": "大学编程", "computer_architecture": "计算机组成",
    "computer_network": "计算机网络", "discrete_mathematics": "离散数学", "education_science": "教育学",
    "electrical_engineer": "注册电气工程师", "environmental_impact_assessment_engineer": "环境影响评价工程师",
    "fire_engineer": "注册消防工程师", "high_school_biology": "高中生物", "high_school_chemistry": "高中化学",
    "high_school_chinese": "高中语文", "high_school_geography": "高中地理", "high_school_history": "高中历史",
    "high_school_mathematics": "高中数学", "high_school_physics": "高中物理",
    "high_school_politics": "高中政治", "ideological_and_moral_cultivation": "思想道德修养与法律基础",
    "law": "法学", "legal_professional": "法律职业资格", "logic": "逻辑学",
    "mao_zedong_thought": "毛泽东思想和中国特色社会主义理论体系概论", "marxism": "马克思主义基本原理",
    "metrology_engineer": "注册计量师", "middle_school_biology": "初中生物",
    "middle_school_chemistry": "初中化学", "middle_school_geography": "初中地理",
    "middle_school_history": "初中历史", "middle_school_mathematics": "初中数学",
    "middle_school_physics": "初中物理", "middle_school_politics": "初中政治",
    "modern_chinese_history": "近代史纲要", "operating_system": "操作系统", "physician": "医师资格",
    "plant_protection": "植物保护", "probability_and_statistics": "概率统计",
    "professional_tour_guide": "导游资格", "sports_science": "体育学", "tax_accountant": "税务师",
    "teacher_qualification": "教师资格", "urban_and_rural_planner": "注册城乡规划师",
    "veterinary_medicine": "兽医学",
}  # fmt: skip


def rows_of(task: str, part: str) -> list[dict[str, Any]]:
    """Rows of one part ("scored" or "shown") with the keys of the local files."""
    quiet()
    from datasets import load_dataset  # takes seconds to import

    repository, config, scored, shown = PLACES[task]
    split = scored if part == "scored" else shown
    configs = [config] if config is not None else sorted(CEVAL_SUBJECTS)
    return [
        as_local(task, name, row) for name in configs for row in load_dataset(repository, name, split=split)
    ]


def as_local(task: str, config: str, row: dict[str, Any]) -> dict[str, Any]:
    """One hub row in the local layout: MMLU has answer indexes, C-Eval choices in columns, ARC nested
    choices.
    """
    if task == "mmlu":
        return {**{k: row[k] for k in ("subject", "question", "choices")}, "answer": "ABCD"[row["answer"]]}
    if task == "ceval":
        choices = [row[letter] for letter in "ABCD"]
        return {"subject": config, "question": row["question"], "choices": choices, "answer": row["answer"]}
    choices, labels = (list(row["choices"][key]) for key in ("text", "label"))
    kept = {"id": row["id"], "question": row["question"]}
    return {**kept, "choices": choices, "labels": labels, "answer": row["answerKey"]}
