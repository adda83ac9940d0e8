"""The quickstart's world: facts about 195 countries, fictional countries, their prose and questions."""
