"""The quickstart's world: facts about 195 countries, fictional ones, their prose and questions."""
